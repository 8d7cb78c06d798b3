"""The HTTP server: OpenAI and Anthropic dialects over one internal request, strict about what it is asked."""
