"""What a strategy declares: options, degrees, order, conflicts; and the plan that follows from it."""
