mod net;
mod traffic;
