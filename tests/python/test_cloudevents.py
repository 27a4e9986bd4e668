"""What arrives is CloudEvents 1.0, by the word of the project's own SDK for Python, which shares no code with us."""

import asyncio
import datetime
import json
import secrets

import kafka
import kafka.admin
import nats
import psycopg
import redis
from cloudevents.core.bindings import http as http_binding
from cloudevents.core.bindings import kafka as kafka_binding

from support import WithDatabase, address

PAYLOAD = {"order": 7, "note": "Grüße, 100 %"}

FORMATS = ("cloudevents", "cloudevents-json")


class OnOneBroker(WithDatabase):
    """Two handlers, one for each format, on the broker of the subclass."""

    def configure(self, kind, connection, destination):
        self.place = "ce-" + secrets.token_hex(6)
        self.configuration = f'[sinks.s]\ntype = "{kind}"\n{connection}\n'
        for format in FORMATS:
            self.configuration += (f'[handlers.{format}]\nevents = ["order.*"]\nsink = "s"\n'
                                   f'{destination} = "{self.place}.{format}"\nformat = "{format}"\n')

    def published(self):
        """Publishes one event to both handlers, lets a bridge carry it, and returns its seq."""
        headers = json.dumps({"traceparent": "00-aa-bb-01"})
        with_key = "select lanebridge.publish('order.paid', %s::jsonb, 'Zoë 7', %s::jsonb, 'order-7-paid')"
        with psycopg.connect(self.url) as connection:
            seq = connection.execute(with_key, (json.dumps(PAYLOAD), headers)).fetchone()[0]
        self.lanebridge("run", "--once")
        self.assertEqual(self.query("select count(*) from lanebridge.deliveries"), [(0,)])
        return seq

    def check(self, event, seq, handler):
        self.assertEqual(event.get_specversion(), "1.0")
        self.assertEqual(event.get_id(), "order-7-paid")
        self.assertEqual(event.get_type(), "order.paid")
        self.assertEqual(event.get_source(), "/lanebridge/lanebridge")
        self.assertEqual(event.get_extension("partitionkey"), "Zoë 7")
        self.assertEqual(event.get_extension("sequence"), str(seq))
        self.assertEqual(event.get_extension("lanebridgehandler"), handler)
        age = datetime.datetime.now(datetime.timezone.utc) - event.get_time()
        self.assertLess(abs(age.total_seconds()), 300)
        data = event.get_data()
        self.assertEqual(data if isinstance(data, dict) else json.loads(data), PAYLOAD)


class Kafka(OnOneBroker):
    def setUp(self):
        brokers = address("LB_KAFKA_BROKERS")
        self.configure("kafka", f'brokers = "{brokers}"', "topic")
        topics = [f"{self.place}.{format}" for format in FORMATS]
        admin = kafka.admin.KafkaAdminClient(bootstrap_servers=brokers)
        self.addCleanup(admin.close)
        admin.create_topics([kafka.admin.NewTopic(topic, 1, 1) for topic in topics])
        self.addCleanup(admin.delete_topics, topics)
        super().setUp()

    def test_both_formats_are_read_by_the_sdk(self):
        seq = self.published()
        for format in FORMATS:
            consumer = kafka.KafkaConsumer(f"{self.place}.{format}", bootstrap_servers=address("LB_KAFKA_BROKERS"),
                                           auto_offset_reset="earliest", consumer_timeout_ms=20_000)
            record = next(consumer)
            consumer.close()
            self.assertEqual(record.key, "Zoë 7".encode())
            headers = dict(record.headers)
            self.assertEqual(headers["traceparent"], b"00-aa-bb-01")
            message = kafka_binding.KafkaMessage(headers=headers, key=record.key, value=record.value)
            self.check(kafka_binding.from_kafka_event(message), seq, format)


class Nats(OnOneBroker):
    def setUp(self):
        self.configure("nats", f'url = "{address("LB_NATS_URL")}"', "subject")
        super().setUp()

    def test_both_formats_are_read_by_the_sdk(self):
        seq, messages = asyncio.run(self.carried())
        for format, message in messages.items():
            self.assertRegex(message.headers["Nats-Msg-Id"], f"^[0-9a-f-]{{36}}/{format}/0/order-7-paid$")
            self.assertEqual(message.headers["traceparent"], "00-aa-bb-01")
            # The NATS binding writes attributes as the HTTP binding does, percent-encoding included.
            http = http_binding.HTTPMessage(headers=dict(message.headers), body=message.data)
            self.check(http_binding.from_http_event(http), seq, format)

    async def carried(self):
        client = await nats.connect(address("LB_NATS_URL"))
        jetstream = client.jetstream()
        await jetstream.add_stream(name=self.place, subjects=[f"{self.place}.>"])
        try:
            seq = await asyncio.get_running_loop().run_in_executor(None, self.published)
            return seq, {format: await jetstream.get_last_msg(self.place, f"{self.place}.{format}") for format in FORMATS}
        finally:
            await jetstream.delete_stream(self.place)
            await client.close()


class Redis(OnOneBroker):
    def setUp(self):
        url = address("LB_REDIS_URL")
        self.configure("redis", f'url = "{url}"', "stream")
        self.redis = redis.Redis.from_url(url)
        self.addCleanup(self.redis.close)
        self.addCleanup(self.redis.delete, *(f"{self.place}.{format}" for format in FORMATS))
        super().setUp()

    def test_both_formats_are_read_by_the_sdk(self):
        seq = self.published()
        for format in FORMATS:
            [(_, fields)] = self.redis.xrange(f"{self.place}.{format}")
            fields = {name.decode(): value for name, value in fields.items()}
            body = fields.pop("data")
            self.assertEqual(fields["traceparent"], b"00-aa-bb-01")
            # CloudEvents has no binding for Redis; ours is Kafka's, with fields for headers.
            message = kafka_binding.KafkaMessage(headers=fields, key=None, value=body)
            self.check(kafka_binding.from_kafka_event(message), seq, format)
