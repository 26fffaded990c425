"""Linear layers split over ranks (Megatron, Shoeybi et al. 2019), and the forms that their weights have."""
