"""The application behind train.py: settings, data, models, training loop, output. No other room imports it."""
