"""Command line: flags, files of flags, exit codes, and a module for each `histocoder` command."""
