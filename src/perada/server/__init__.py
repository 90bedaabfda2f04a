"""What happens at the server: distillation and its guard."""
