"""Caffe's network language on torch."""
