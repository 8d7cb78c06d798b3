"""Many requests on one model: a bounded queue, chunked prefill beside batched decode, and what each asker is told."""
