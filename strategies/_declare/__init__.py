"""The declarations of a strategy: options, degrees, order, conflicts; and the plan that follows from them."""
