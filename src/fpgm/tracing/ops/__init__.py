"""What each ATen operator does to channel labels, one file for each kind of operator."""
