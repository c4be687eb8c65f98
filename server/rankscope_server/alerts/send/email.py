"""Mail by SMTP. A repeat has the same Message-ID; all mails about one problem are one thread."""

from __future__ import annotations

import contextlib
import smtplib
import socket
import ssl
from collections.abc import Iterator
from email.message import EmailMessage
from email.utils import formatdate
from typing import Any

from rankscope.http import HttpError
from rankscope_server.alerts.channels import Email
from rankscope_server.alerts.message import Message, lines_of, plain
from rankscope_server.alerts.send.outbound import (
    DEADLINE_SECONDS,
    TIMEOUT_SECONDS,
    DeliveryError,
    Outbound,
    RefusedPeerError,
    deadline,
)

_MOST_SUBJECT = 180


def send_email(target: Email, message: Message, outbound: Outbound) -> None:
    """Send a message. Raises DeliveryError."""
    mail = mail_of(target, message, outbound.public_url)
    try:
        with _connected(target, outbound) as server:
            refused = server.send_message(mail, target.sender, target.recipients)
    except RefusedPeerError as error:
        raise DeliveryError(str(error), is_final=True) from error
    except smtplib.SMTPResponseException as error:
        text = f"SMTP {error.smtp_code}: {_words(error.smtp_error)}"
        raise DeliveryError(text, is_final=error.smtp_code >= 500) from error
    except smtplib.SMTPRecipientsRefused as error:
        codes = [code for code, _ in error.recipients.values()]
        text = f"no recipient was taken: {_words(next(iter(error.recipients.values()))[1])}"
        raise DeliveryError(text, is_final=min(codes) >= 500) from error
    except smtplib.SMTPNotSupportedError as error:
        raise DeliveryError(f"{_words(error)}; see security and user", is_final=True) from error
    except (smtplib.SMTPException, HttpError, OSError, ValueError) as error:
        raise DeliveryError(_words(error)) from error
    if refused:
        raise DeliveryError(
            f"taken, but not for {len(refused)} of {len(target.recipients)} recipients",
            is_final=True,
        )


def mail_of(target: Email, message: Message, public_url: str) -> EmailMessage:
    """Return the mail."""
    mail = EmailMessage()
    domain = target.sender.rpartition("@")[2]
    about = plain(message.run_name or message.run_id or "server", 60)
    mail["Subject"] = plain(f"[{message.severity}] {message.title} ({about})", _MOST_SUBJECT)
    mail["From"] = target.sender
    mail["To"] = ", ".join(target.recipients)
    mail["Date"] = formatdate(message.time_ms / 1e3 or None)
    mail["Message-ID"] = f"<{message.id}@{domain}>"
    mail["References"] = f"<{message.alert}@{domain}>"
    mail["Auto-Submitted"] = "auto-generated"  # no answers of absence
    mail.set_content("\n\n".join(map(plain, lines_of(message, public_url))) + "\n")
    return mail


@contextlib.contextmanager
def _connected(target: Email, outbound: Outbound) -> Iterator[smtplib.SMTP]:
    """Give a connection that is encrypted and signed in as the channel says."""
    context = ssl.create_default_context()
    secure = {"context": context} if target.security == "tls" else {}
    kind: Any = _checked(smtplib.SMTP_SSL if secure else smtplib.SMTP, outbound)
    server = kind(timeout=TIMEOUT_SECONDS, **secure)

    def end() -> None:
        if server.sock is not None:
            with contextlib.suppress(OSError):
                server.sock.shutdown(socket.SHUT_RDWR)

    try:
        with deadline(end, DEADLINE_SECONDS):
            server._host = target.host  # the name that a certificate must have
            server.connect(target.host, target.port)
            if target.security == "starttls":
                server.starttls(context=context)
            if target.user or target.password:
                server.login(target.user, target.password)
            yield server
            with contextlib.suppress(smtplib.SMTPException):
                server.quit()  # the mail was taken: a bad farewell is no failure
    finally:
        server.close()


def _checked(kind: type[smtplib.SMTP], outbound: Outbound) -> type[smtplib.SMTP]:
    """Return a class that speaks only to addresses that may be asked."""

    class Checked(kind):  # type: ignore[misc,valid-type]
        def _get_socket(self, host: str, port: int, timeout: float) -> socket.socket:
            found = socket.create_connection((host, port), timeout)
            try:
                outbound.check_peer(found.getpeername()[0])
                if issubclass(kind, smtplib.SMTP_SSL):
                    secure: socket.socket = self.context.wrap_socket(found, server_hostname=host)
                    return secure
            except BaseException:
                found.close()
                raise
            return found

    return Checked


def _words(error: object) -> str:
    text = error.decode(errors="replace") if isinstance(error, bytes) else str(error)
    return plain(text, 300) or type(error).__name__
