"""The coordinator: one process is one run. It holds the loop, the ledger and the tokenizer, and no model."""
