"""What the user's script does, found in its code, its objects and its lives."""
