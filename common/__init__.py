"""The ground floor that both services stand on; it knows neither of them."""
