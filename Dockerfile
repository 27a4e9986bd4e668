# syntax=docker/dockerfile:1

FROM rust:1-bookworm AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends libssl-dev zlib1g-dev pkg-config \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY . .
# The caches are not part of the image, so the binary is copied out of them in the same step.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/build/target \
    cargo build --release --locked && cp target/release/lanebridge /lanebridge

FROM debian:bookworm-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends libssl3 zlib1g ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin lanebridge
COPY --from=build /lanebridge /usr/local/bin/lanebridge
USER 10001
ENV LANEBRIDGE_CONFIG=/etc/lanebridge/lanebridge.toml
# SIGTERM drains: the bridge stops taking work, finishes what is in flight and releases its lanes.
STOPSIGNAL SIGTERM
ENTRYPOINT ["lanebridge"]
CMD ["run"]
