ENCODER_FILE, START_FILE, STEP_FILE = "encoder.onnx", "decoder_start.onnx", "decoder_step.onnx"
NGRAMS_FILE, LINEAR_FILE = "linear_ngrams.onnx", "linear.npz"
