"""The encoders: open_clip architectures behind two towers and a scale."""
