//! Jobs that wait: one line for each order that is kept.

use std::collections::{HashMap, VecDeque};

use super::Job;
use crate::verbs::memory::Order;

/// Lines of jobs, which take turns. Bounded by the engine's budgets.
pub(super) struct Lines {
    lines: HashMap<Order, VecDeque<Job>>,
    /// Those with a job.
    turns: VecDeque<Order>,
    jobs: usize,
}

impl Lines {
    pub(super) fn new() -> Self {
        Self { lines: HashMap::new(), turns: VecDeque::new(), jobs: 0 }
    }

    pub(super) fn push(&mut self, job: Job) {
        let order = job.order();
        let line = self.lines.entry(order).or_default();
        if line.is_empty() {
            self.turns.push_back(order);
        }
        line.push_back(job);
        self.jobs += 1;
    }

    /// Jobs of all lines.
    pub(super) const fn len(&self) -> usize {
        self.jobs
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.jobs == 0
    }

    /// Lines with a job.
    pub(super) fn orders(&self) -> usize {
        self.turns.len()
    }

    /// Whose turn it is; the next call answers the next one.
    pub(super) fn turn(&mut self) -> Option<Order> {
        let order = self.turns.pop_front()?;
        self.turns.push_back(order);
        Some(order)
    }

    pub(super) fn line(&self, order: Order) -> Option<&VecDeque<Job>> {
        self.lines.get(&order)
    }

    pub(super) fn front(&self, order: Order) -> Option<&Job> {
        self.line(order)?.front()
    }

    pub(super) fn pop(&mut self, order: Order) -> Option<Job> {
        self.take(order, 1).pop()
    }

    /// Takes the first `count` jobs of a line, or as many as there are.
    pub(super) fn take(&mut self, order: Order, count: usize) -> Vec<Job> {
        let Some(line) = self.lines.get_mut(&order) else { return Vec::new() };
        let jobs: Vec<Job> = line.drain(..count.min(line.len())).collect();
        self.jobs = self.jobs.saturating_sub(jobs.len());
        if line.is_empty() {
            self.lines.remove(&order);
            self.turns.retain(|known| *known != order);
        }
        jobs
    }
}
