"""Personal predictions and exported models."""
