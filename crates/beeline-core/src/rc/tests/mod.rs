mod datagrams;
mod fuzz;
mod net;
mod rules;
mod traffic;
