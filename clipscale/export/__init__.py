"""`clipscale export`: a run's weights in the formats of open_clip, transformers, ONNX and torch.export."""
