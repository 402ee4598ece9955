"""Finds weights and puts them into a model. In the order of work, a file each:

    hub.py              asks whether weights on a server can be fetched, before anything else
    sources.py          value of `model.weights` -> `Source`: a file, a folder, a run's checkpoint, a tag of open_clip
    model_settings.py   settings of a model -> the same, with the architecture that its weights describe
    descriptions.py     configuration beside the weights -> open_clip's description of the model
    hugging_face.py     the same for transformers' CLIP and SigLIP, by the table hugging_face.yaml
    key_styles.py       keys in the file -> keys of the model, without their wrappers
    shapes.py           shapes in the file -> what does not fit the model, before torch is loaded; by shapes.yaml
    adapters.py         PEFT's adapters -> merged into the weights that they change
    renaming.py         transformers' keys -> open_clip's, and back for an export
    load_weights.py     reads the file, does all of this, and fills the model

One key of a checkpoint of a compiled student in DDP, on its way:

    in the file         state_dict / module.student.vision_model._orig_mod.encoder.layers.3.self_attn.q_proj.weight
    weight set          at `state_dict`, one of the `USUAL_KEYS`            (`choose_weight_set`)
    wrapping            prefix `module.student.`, inserted `_orig_mod`      (`Wrapping`)
    canonical key       vision_model.encoder.layers.3.self_attn.q_proj.weight
    key pattern         vision_model.encoder.layers.#.self_attn.q_proj.weight, in the `KeyStyle` of transformers
    key of the model    visual.transformer.resblocks.3.attn.in_proj_weight, its first rows   (`from_transformers`)
"""
