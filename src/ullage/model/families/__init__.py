"""One file per model_type of config.json, named like it: ``spec(keys) -> DecoderSpec``. A file here is a supported type."""
