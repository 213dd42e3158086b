"""Text to token ids and back: tokenizer, detokenizer, chat templates and tool calls."""
