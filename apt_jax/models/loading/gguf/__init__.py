"""GGUF files: the file format, and the models and tokenizers in it."""
