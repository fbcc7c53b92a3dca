from __future__ import annotations

from django.db import migrations, models
from django.db.models import CASCADE, Q


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Conversation",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("owner", models.CharField(max_length=255, verbose_name="owner")),
                ("root", models.CharField(max_length=255, verbose_name="first response")),
                ("expires", models.FloatField(verbose_name="expires")),
            ],
            options={
                "verbose_name": "conversation",
                "verbose_name_plural": "conversations",
                "constraints": [
                    models.UniqueConstraint(fields=("owner", "root"), name="responses_kit_conversation_root"),
                ],
                "indexes": [models.Index(fields=["expires"], name="responses_kit_conv_expires")],
            },
        ),
        migrations.CreateModel(
            name="Response",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "conversation",
                    models.ForeignKey(
                        on_delete=CASCADE,
                        related_name="responses",
                        to="responses_kit_django.conversation",
                        verbose_name="conversation",
                    ),
                ),
                ("owner", models.CharField(max_length=255, verbose_name="owner")),
                ("response_id", models.CharField(max_length=255, verbose_name="id")),
                ("previous", models.CharField(max_length=255, null=True, verbose_name="continues")),
                ("key", models.CharField(max_length=255, null=True, verbose_name="idempotency key")),
                ("head", models.TextField()),
                ("names", models.TextField()),
                ("final", models.BooleanField(verbose_name="ended")),
                ("cancelled", models.BooleanField(verbose_name="to be cancelled")),
                ("lease", models.FloatField()),
                ("logged_until", models.FloatField(null=True)),
                ("events", models.CharField(max_length=8)),
                ("input", models.TextField(verbose_name="input")),
                ("response", models.TextField(verbose_name="response")),
                ("request", models.BinaryField(blank=True)),
                ("status", models.CharField(max_length=20, verbose_name="status")),
                ("model", models.CharField(max_length=255, verbose_name="model")),
                ("background", models.BooleanField(default=False, verbose_name="in the background")),
                ("input_tokens", models.BigIntegerField(null=True, verbose_name="input tokens")),
                ("output_tokens", models.BigIntegerField(null=True, verbose_name="output tokens")),
                ("created", models.DateTimeField(verbose_name="created")),
            ],
            options={
                "verbose_name": "response",
                "verbose_name_plural": "responses",
                "default_permissions": ("delete", "view"),
                "constraints": [
                    models.UniqueConstraint(fields=("owner", "response_id"), name="responses_kit_response_id"),
                    models.UniqueConstraint(
                        condition=Q(key__isnull=False), fields=("owner", "key"), name="responses_kit_response_key"
                    ),
                ],
                "indexes": [
                    models.Index(condition=Q(final=False), fields=["lease"], name="responses_kit_response_lease"),
                    models.Index(
                        condition=Q(logged_until__isnull=False),
                        fields=["logged_until"],
                        name="responses_kit_response_log",
                    ),
                    models.Index(fields=["-created"], name="responses_kit_response_created"),
                ],
            },
        ),
        migrations.CreateModel(
            name="Item",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "response",
                    models.ForeignKey(on_delete=CASCADE, related_name="items", to="responses_kit_django.response"),
                ),
                ("owner", models.CharField(max_length=255)),
                ("item_id", models.CharField(max_length=255)),
            ],
            options={
                "default_permissions": (),
                "constraints": [
                    models.UniqueConstraint(fields=("owner", "item_id", "response"), name="responses_kit_item_place"),
                ],
            },
        ),
        migrations.CreateModel(
            name="Piece",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "response",
                    models.ForeignKey(
                        db_index=False, on_delete=CASCADE, related_name="pieces", to="responses_kit_django.response"
                    ),
                ),
                ("start", models.BigIntegerField()),
                ("count", models.IntegerField()),
                ("data", models.BinaryField()),
            ],
            options={
                "default_permissions": (),
                "constraints": [
                    models.UniqueConstraint(fields=("response", "start"), name="responses_kit_piece_start"),
                ],
            },
        ),
    ]
