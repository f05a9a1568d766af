"""Sub-commands of `kvcar` beyond running the server. Each module imports what it needs inside its command."""
