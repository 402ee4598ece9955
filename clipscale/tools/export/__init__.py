"""`clipscale export`: a run's weights as a folder that open_clip or transformers loads, with a model card."""
