"""The process and its machine: other processes, signals, output, files, compiled programs, the folder of a run."""
