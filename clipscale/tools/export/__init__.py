"""`clipscale export`: a run's weights as a folder that open_clip loads, with a model card."""
