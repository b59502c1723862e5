"""GGUF files: their format, the models and the tokenizers in them."""
