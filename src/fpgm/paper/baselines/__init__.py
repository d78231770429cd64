"""The pruning methods that FPGM is compared with, one file each."""
