"""The application behind train.py: settings, data, models, the loop, and what a run shows. Nothing imports it."""
