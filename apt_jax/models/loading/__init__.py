"""Loading: find a model by its name, check its files, and put its weights on the devices."""
