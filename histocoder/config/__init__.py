"""Settings of a run, which `run` puts together, and of a model, checked when they are built."""

from histocoder.config.model import (
    ALL_LANGUAGES,
    FLAT_LOSSES,
    LANG_SEP,
    MAX_TARGET_LEN,
    ModelConfig,
    check_target_len,
)
from histocoder.config.prediction import SOURCE_COL, ClassOptions, PredictConfig, PredictOptions
from histocoder.config.run import (
    NO_COLUMN,
    NUM_CODES,
    NUM_GREEDY,
    RANK_TIMEOUT,
    FinetuneConfig,
    MachineConfig,
    MixerConfig,
    PrepareConfig,
    RunConfig,
    TrainConfig,
)
from histocoder.config.settings import Settings, recorded, settings_of, without_effect
from histocoder.config.training import (
    AUTO,
    NORMALIZATIONS,
    PRECISIONS,
    PRETRAINED_ENCODER,
    RECIPES,
    STARTS,
    FitConfig,
)
