"""The methods the paper compares itself with, one file each."""
