mod datagrams;
mod net;
mod rules;
mod traffic;
