"""Which channels of a network must move together."""
