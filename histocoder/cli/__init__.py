"""Programs: flags and files of them, how a program ends, and a module for each `histocoder` command."""
