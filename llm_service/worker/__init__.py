"""Computes what a step plan says; decides nothing."""
