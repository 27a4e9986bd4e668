//! A broker that stops and comes back.
