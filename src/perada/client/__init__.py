"""What happens where the data are: training and scoring, many clients at once or one on its own machine."""
