"""Front doors for people who come from another library: its class names, carried by a job of ours."""
