"""A package: the services that its tests share end with the last of them."""
