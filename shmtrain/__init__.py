"""Trains Caffe prototxt models on several workers that share weights through a memory box."""
