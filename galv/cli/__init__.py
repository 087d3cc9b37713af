"""The `galv` command, one file a subcommand: each parses, calls `galv.api` and prints. Nothing here decides."""
