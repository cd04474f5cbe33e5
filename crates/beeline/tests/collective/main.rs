//! Collectives between simulated GPUs, in one process and in several.

mod data;
mod order;
mod processes;
mod support;
mod trouble;
