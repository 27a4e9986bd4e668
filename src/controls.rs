//! Negative controls: each breaks one rule, so that the checkers can be seen to catch it by name (`tests/faults/controls.rs`).
//!
//! Only the feature `break-rules` builds them, and no optimised build takes it: nothing a user runs can be told to break a
//! rule.

#[cfg(all(feature = "break-rules", not(debug_assertions)))]
compile_error!("break-rules is for tests; it takes away what the bridge promises");

/// Whether `LANEBRIDGE_BREAK` names this rule.
#[cfg(feature = "break-rules")]
pub(crate) fn breaks(rule: &str) -> bool {
    std::env::var_os("LANEBRIDGE_BREAK").is_some_and(|wanted| wanted == rule)
}

/// Never.
#[cfg(not(feature = "break-rules"))]
#[inline(always)]
pub(crate) const fn breaks(_rule: &str) -> bool {
    false
}
