"""For people who come with a model, a loop and often a `ds_config.json` of their own."""
