"""Fleet inside other frameworks: Lightning, Hugging Face's Trainer, Ray."""
