//! Beeline.
