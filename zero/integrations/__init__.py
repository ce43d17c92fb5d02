"""Integrations that let the training loops of other libraries train with an `Engine`, one file for each library."""
