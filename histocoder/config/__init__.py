"""What a run is made of, checked where it is built: its settings (`run` puts them together), and the model's own."""

from histocoder.config.data import NUM_CODES, DataConfig
from histocoder.config.model import (
    ALL_LANGUAGES,
    DEFAULT_THRESHOLDS,
    FLAT_LOSSES,
    FORMAT_VERSION,
    LANG_SEP,
    MAX_TARGET_LEN,
    MODEL_TYPE,
    ModelConfig,
    check_target_len,
)
from histocoder.config.run import (
    NUM_GREEDY,
    RANK_TIMEOUT,
    FinetuneConfig,
    LoaderConfig,
    MixerConfig,
    PrepareConfig,
    RunConfig,
    TrainConfig,
)
from histocoder.config.settings import Settings, recorded, settings_of
from histocoder.config.training import NORMALIZATIONS, PRECISIONS, AugmentConfig, FitConfig, StrategyConfig

__all__ = [
    "ALL_LANGUAGES",
    "DEFAULT_THRESHOLDS",
    "FLAT_LOSSES",
    "FORMAT_VERSION",
    "LANG_SEP",
    "MAX_TARGET_LEN",
    "MODEL_TYPE",
    "NORMALIZATIONS",
    "NUM_CODES",
    "NUM_GREEDY",
    "PRECISIONS",
    "RANK_TIMEOUT",
    "AugmentConfig",
    "DataConfig",
    "FinetuneConfig",
    "FitConfig",
    "LoaderConfig",
    "MixerConfig",
    "ModelConfig",
    "PrepareConfig",
    "RunConfig",
    "Settings",
    "StrategyConfig",
    "TrainConfig",
    "check_target_len",
    "recorded",
    "settings_of",
]
