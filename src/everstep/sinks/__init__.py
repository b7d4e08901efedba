"""A job's story told elsewhere: TensorBoard, Weights & Biases, MLflow, OpenTelemetry, from its run directory."""
