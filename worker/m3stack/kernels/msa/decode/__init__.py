"""MSA at decode: few query rows a request, long contexts, everything inside one CUDA graph."""
